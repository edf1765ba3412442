"""Models small enough to be made on a CPU in a minute each, so that tests can ask them what they mean.

    python -m recipes                  which there are, and where those lie that are made
    python -m recipes embedder vision  makes what is not made yet; `all` for every one
    python -m recipes --seed 3 speech  tries a recipe with another seed; leaves the cache as it is

A recipe is a folder here with a `recipe.py`, whose `make(out, seed)` trains a model until its gate holds (see
`recipes.gate`), saves it into the empty folder `out` as engines read it, examines what was saved, and returns
a sentence about the exam. It raises `NotLearned` when the model has not learned; then the next seed is tried.
What is made lies in a cache (see `recipes.shelf`).

Models differ from processor to processor, as sums come in another order. To see how a recipe does on others:
`ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 python -m recipes --seed 3 speech`, or avx2 and AVX2.
"""


class NotLearned(Exception):
    """The model that a recipe made has failed its exam; says what was asked and what came."""
