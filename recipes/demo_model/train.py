"""Makes the demo model: learns questions.yaml by heart on CPU, from fixed seeds, in a minute or two.

    python recipes/demo_model/train.py [--out DIR]

Training goes on until every conversation among the checks of `conversations` is answered with a clear lead,
so that every number format and every engine gives the same greedy text. What was saved is then loaded and
asked; one wrong answer is exit status 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from conversations import Conversation, Knowledge, checks, conversation, passage, read
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

HERE = Path(__file__).parent
PRODUCT = HERE.parent.parent / "src" / "penstock" / "demo"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 1024
POSITIONS = 16_384
ROWS = 24
OPENING_TOKENS = 6
FALL_STEPS = 320
CHECK_FROM, CHECK_EVERY, LAST_STEP = 225, 25, 600
CLEAR_LEAD = 1.0
"""In logits. bfloat16 moves a lead by about 0.1."""
IGNORED = -100

Row = tuple[list[int], list[int]]
"""Token ids, and the same ids as labels with IGNORED in place of all that is not to be learned."""


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


def predict(model: Qwen2ForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every label of `rows` that counts: the logits (n, VOCABULARY), the label (n,), its row (n,)."""
    width = max(len(ids) for ids, _ in rows)
    # Filled up on the right, where no token of a causal model looks: no mask is needed.
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])[:, 1:]
    hidden = model.model(input_ids=inputs[:, :-1], use_cache=False).last_hidden_state
    counts = labels != IGNORED
    return model.lm_head(hidden[counts]), labels[counts], counts.nonzero()[:, 0]


@torch.inference_mode()
def leads(model: Qwen2ForCausalLM, rows: list[Row]) -> list[float]:
    """For each row, by how much a right token leads the best wrong one at least; below 0 it is lost."""
    found: list[float] = []
    for first in range(0, len(rows), 64):
        some = rows[first : first + 64]
        logits, labels, owners = predict(model, some)
        right = logits.gather(1, labels[:, None])[:, 0]
        wrong = logits.scatter(1, labels[:, None], float("-inf")).amax(dim=1)
        least = torch.full((len(some),), float("inf"))
        found += least.scatter_reduce(0, owners, (right - wrong).float(), "amin").tolist()
    return found


def schedules(model: Qwen2ForCausalLM) -> list[LambdaLR]:
    """Muon for the matrices, which need fewer steps with it, and AdamW for the rest, at one falling rate."""
    layers = list(model.model.layers.parameters())
    matrices = [weight for weight in layers if weight.ndim == 2]
    others = [weight for weight in layers if weight.ndim != 2]
    others += [model.model.embed_tokens.weight, model.model.norm.weight]
    optimizers = (
        torch.optim.Muon(matrices, lr=0.024, weight_decay=0.0),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    )

    def rate(step: int) -> float:
        return min(1, (step + 1) / 30) * max(0.03, 1 - step / FALL_STEPS)

    return [LambdaLR(optimizer, rate) for optimizer in optimizers]


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


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, knowledge: Knowledge) -> None:
    """Teach until no check is weak, at most LAST_STEP steps. Weak checks are shown more often."""
    began, rng = time.monotonic(), random.Random(0)
    rows = [encode_check(tokenizer, asked, answer) for asked, answer in checks(knowledge)]
    rows.sort(key=lambda row: len(row[0]))
    weak: list[Row] = []
    steppers = schedules(model)
    for step in range(1, LAST_STEP + 1):
        logits, labels, _ = predict(model, draw(tokenizer, knowledge, weak, step, rng))
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for schedule in steppers:
            schedule.optimizer.step()
            schedule.optimizer.zero_grad()
            schedule.step()
        if step % CHECK_EVERY:
            continue
        print(f"step {step:3}  loss {loss.item():.4f}  {time.monotonic() - began:5.1f} s", flush=True)
        if step >= CHECK_FROM:
            least = leads(model, rows)
            weak = [row for row, lead in zip(rows, least, strict=True) if lead < CLEAR_LEAD]
            print(
                f"    {len(weak)} of {len(rows)} checks are weak, least lead {min(least):.1f}",
                flush=True,
            )
            if not weak:
                return


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=PRODUCT, help="folder of the model (default: the package's)"
    )
    out = parser.parse_args().out
    torch.set_num_threads(min(2, torch.get_num_threads()))  # the matrices are too small for more
    torch.manual_seed(0)
    knowledge = read(HERE / "questions.yaml")
    tokenizer = build_tokenizer(list(knowledge.texts()))
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(knowledge.known)} answers")
    train(model, tokenizer, knowledge)
    save(model, tokenizer, out)
    wrong = wrong_answers(out, knowledge)
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
