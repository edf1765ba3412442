"""Makes the demo model: learns questions.yaml by heart on CPU, from fixed seeds, in a minute or two.

    python -m recipes.demo_model.train [--out DIR | --steps N]

Training goes on until every conversation among the checks of `conversations` is answered with a clear lead,
so that every number format and every engine gives the same greedy text. What was saved is then loaded and
asked; one wrong answer is exit status 1. `trained.json` says of which recipe the package's model is, and how
its loss fell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from recipes.decoder import IGNORED, Row, Steps, leads, predict
from recipes.demo_model.conversations import Conversation, Knowledge, checks, conversation, passage, read

HERE = Path(__file__).parent
PRODUCT = HERE.parent.parent / "src" / "penstock" / "demo"
RECORD = HERE / "trained.json"
MADE_FROM = ("questions.yaml", "conversations.py", "train.py", "chat_template.jinja", "../decoder.py")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 1024
POSITIONS = 16_384
ROWS = 24
OPENING_TOKENS = 6
FALL_STEPS = 320
CHECK_FROM, CHECK_EVERY, LAST_STEP = 225, 25, 600
CLEAR_LEAD = 1.0


def build_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """Byte-level BPE learned from `texts`, of the class that transformers takes for this type of model."""
    blank = Qwen2Tokenizer(
        eos_token=END, pad_token=PAD, unk_token=None, add_prefix_space=False, model_max_length=POSITIONS
    )
    tokenizer = blank.train_new_from_iterator(
        texts, VOCABULARY, new_special_tokens=[START], show_progress=False
    )
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """An untrained decoder. Its heads have 64 dimensions, which every attention kernel takes."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        # Short waves: the question to answer is the nearest one, and far tokens need not be told apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def encode(tokenizer: Qwen2Tokenizer, messages: Conversation, opening: int | None = None) -> Row:
    """The chat template's ids for `messages`. To be learned: answers and that they end.

    opening: keep only so many tokens of each answer, and do not learn that it ends there.
    """
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"{START}{message['role']}\n")
        body = tokenizer.encode(message["content"])[: opening if message["role"] == "assistant" else None]
        tail = tokenizer.encode(f"{END}\n")
        ids += head + body + tail
        labels += [IGNORED] * len(head)
        if message["role"] != "assistant":
            labels += [IGNORED] * len(body + tail)
        elif opening is not None:
            labels += body + [IGNORED] * len(tail)
        else:
            labels += body + tail[:1] + [IGNORED] * (len(tail) - 1)
    return ids, labels


def encode_check(tokenizer: Qwen2Tokenizer, asked: Conversation, answer: str) -> Row:
    """`asked` and then `answer`, of which only the answer and its end count."""
    before, _ = encode(tokenizer, asked)
    ids, labels = encode(tokenizer, [*asked, {"role": "assistant", "content": answer}])
    return ids, [IGNORED] * len(before) + labels[len(before) :]


def encode_passage(tokenizer: Qwen2Tokenizer, text: str) -> Row:
    """Text without a template, as /v1/completions gets it, learned from its second token to its end."""
    ids = tokenizer.encode(text + END)
    return ids, [IGNORED, *ids[1:]]


def rate(step: int) -> float:
    return min(1, (step + 1) / 30) * max(0.03, 1 - step / FALL_STEPS)


def draw(
    tokenizer: Qwen2Tokenizer, knowledge: Knowledge, weak: list[Row], step: int, rng: random.Random
) -> list[Row]:
    """The rows of one step: whole conversations, weak checks, or openings of single answers.

    Which answer it is, is harder to learn than how that answer goes on, and shows in its first tokens.
    """
    if step % 2:
        talks = (conversation(knowledge, 1, rng) for _ in range(2 * ROWS))
        return [encode(tokenizer, talk, OPENING_TOKENS) for talk in talks]
    if weak and step % 4 == 0:
        first = rng.randrange(max(1, len(weak) - 2 * ROWS))  # neighbours, for they are of one length
        return weak[first : first + 2 * ROWS]
    turns = rng.choice((1, 2, 4, 8))
    rows = [encode(tokenizer, conversation(knowledge, turns, rng)) for _ in range(ROWS // turns)]
    return rows + [encode_passage(tokenizer, passage(knowledge, rng)) for _ in range(ROWS // 12)]


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, knowledge: Knowledge, last_step: int = LAST_STEP
) -> dict[str, float]:
    """Teach until no check is weak, at most so many steps; gives the losses on the way, by step.

    Weak checks are shown more often.
    """
    began, rng = time.monotonic(), random.Random(0)
    losses: dict[str, float] = {}
    rows = [encode_check(tokenizer, asked, answer) for asked, answer in checks(knowledge)]
    rows.sort(key=lambda row: len(row[0]))
    weak: list[Row] = []
    steps = Steps(model, muon=0.024, adam=0.004, rate=rate)
    for step in range(1, last_step + 1):
        logits, labels, _ = predict(model, draw(tokenizer, knowledge, weak, step, rng))
        loss = functional.cross_entropy(logits, labels)
        steps.take(loss)
        if step % CHECK_EVERY:
            continue
        losses[str(step)] = round(loss.item(), 4)
        print(f"step {step:3}  loss {loss.item():.4f}  {time.monotonic() - began:5.1f} s", flush=True)
        if step >= CHECK_FROM:
            least = leads(model, rows)
            weak = [row for row, lead in zip(rows, least, strict=True) if lead < CLEAR_LEAD]
            print(
                f"    {len(weak)} of {len(rows)} checks are weak, least lead {min(least):.1f}",
                flush=True,
            )
            if not weak:
                break
    return losses


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """The folder that engines read, in bfloat16, which no engine converts."""
    model.generation_config = GenerationConfig(
        # A request that names no temperature gets the learned answer, not a sample around it.
        do_sample=True,
        temperature=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


@torch.inference_mode()
def wrong_answers(folder: Path, knowledge: Knowledge) -> list[str]:
    """What the saved model says instead of each answer, asked for all of them in one batch."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = [[{"role": "user", "content": topic.asks[0]}] for topic in knowledge.known]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=128)
    width = inputs["input_ids"].shape[1]
    said = [text.replace(PAD, "") for text in tokenizer.batch_decode(ids[:, width:])]
    return [
        f"{topic.asks[0]} -> {text}"
        for topic, text in zip(knowledge.known, said, strict=True)
        if text != topic.answer + END
    ]


def fingerprint() -> str:
    """Of all that the model is made from, PyTorch's version included."""
    digest = hashlib.sha256(torch.__version__.partition("+")[0].encode())
    for name in MADE_FROM:
        digest.update(b"\0" + (HERE / name).read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=PRODUCT, help="folder of the model (default: the package's)"
    )
    parser.add_argument("--steps", type=int, help="only so many: prints their losses, saves nothing")
    out, steps = parser.parse_args().out, parser.parse_args().steps
    torch.set_num_threads(min(2, torch.get_num_threads()))  # the matrices are too small for more
    torch.manual_seed(0)
    knowledge = read(HERE / "questions.yaml")
    tokenizer = build_tokenizer(list(knowledge.texts()))
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(knowledge.known)} answers")
    losses = train(model, tokenizer, knowledge, steps or LAST_STEP)
    if steps:
        print(json.dumps(losses))
        return
    save(model, tokenizer, out)
    wrong = wrong_answers(out, knowledge)
    print(*wrong, sep="\n")
    if not wrong and out == PRODUCT:
        RECORD.write_text(json.dumps({"recipe": fingerprint(), "losses": losses}, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
