"""Models small enough to be made on a CPU in a minute each, so that tests can ask them what they mean.

    python -m recipes                  which there are, and where those lie that are made
    python -m recipes embedder vision  makes what is not made yet; `all` for every one

A recipe is a folder here with a `recipe.py`, whose `make(out)` trains a model from fixed seeds, saves it into
the empty folder `out` as engines read it, examines what was saved, and returns a sentence about the exam. It
raises `NotLearned` when the model has not learned. What is made lies in a cache (see `recipes.shelf`).
"""


class NotLearned(Exception):
    """The model that a recipe made has failed its exam; says what was asked and what came."""
