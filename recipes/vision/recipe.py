"""A Qwen2-VL that names the coloured shapes in pictures and in a video, and reports one by a tool.

A picture costs it a token for each 28 x 28 pixels, from 4 to 9 unless `max_pixels` says otherwise; two frames
of a video cost 4.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from recipes.decoder import IGNORED, Row, ahead, least
from recipes.gate import Gate
from recipes.vision.lessons import KINDS, TOOL, Lesson, exam, taught, texts
from recipes.vision.pictures import drawn
from recipes.vision.sight import Model, Seen, Steps, look, open_eyes, watch

HERE = Path(__file__).parent
SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PAD, END = "<|endoftext|>", "<|im_end|>"
VOCABULARY, WIDTH, TOKEN_PIXELS = 480, 128, 28 * 28
ROWS, CHECK_EVERY, LAST_STEP, FALL_STEPS = 32, 25, 600, 250
PICTURES, VIDEOS = 25, 4
"""Of each kind, to learn from."""
CLEAR_LEAD = 0.7


def make(out: Path, seed: int) -> str:
    """Trains and examines; a minute or two on one core."""
    torch.manual_seed(seed)
    processor = reader()
    model = build(processor.tokenizer)
    open_eyes(model, processor, random.Random(seed))
    gate, asked = Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP), list(exam())
    steps = train(model, processor, asked, gate, random.Random(seed))
    model.generation_config = GenerationConfig(
        # A request that names no temperature gets the learned answer, not a sample around it.
        do_sample=True,
        temperature=0.1,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    processor.save_pretrained(out)
    saved = Qwen2VLForConditionalGeneration.from_pretrained(out)
    found = leads(saved, processor, asked, Memory(saved, processor, asked))
    return f"{gate.examine(found)}, after {steps} steps."


def reader() -> Qwen2VLProcessor:
    """What makes tokens of text, pictures and videos."""
    blank = Qwen2Tokenizer(eos_token=END, pad_token=PAD, unk_token=None, add_prefix_space=False)
    tokenizer = blank.train_new_from_iterator(
        texts(), VOCABULARY, new_special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(min_pixels=4 * TOKEN_PIXELS, max_pixels=9 * TOKEN_PIXELS),
        tokenizer,
        Qwen2VLVideoProcessor(min_pixels=4 * TOKEN_PIXELS, max_pixels=4 * TOKEN_PIXELS),
        chat_template=tokenizer.chat_template,
    )


def build(tokenizer: Qwen2Tokenizer) -> Model:
    """An untrained one. Its heads have 64 dimensions, which every attention kernel takes."""
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL[1:])
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [8, 12, 12]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    eyes = {"depth": 2, "embed_dim": 64, "num_heads": 1, "mlp_ratio": 2, "initializer_range": 0.1}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text,
            vision_config=eyes | {"hidden_size": WIDTH},
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    )


class Memory:
    """What the eyes made of all that lessons show: it is looked at once."""

    def __init__(self, model: Model, processor: Qwen2VLProcessor, lessons: list[Lesson]) -> None:
        pictures = [picture for lesson in lessons for picture in lesson.pictures]
        videos = [lesson.video for lesson in lessons if lesson.video]
        with torch.no_grad():
            seen = look(model, processor, pictures) + watch(model, processor, videos)
        self._seen = {id(shown): one for shown, one in zip([*pictures, *videos], seen, strict=True)}
        self._kept = lessons  # ids are of what lives

    def of(self, shown: object) -> Seen:
        """Of one picture or video."""
        return self._seen[id(shown)]


def encode(processor: Qwen2VLProcessor, lesson: Lesson, memory: Memory) -> Row:
    """The template's ids, then the answer's, of which alone something is learned."""
    tools = [TOOL] if lesson.tools else None
    prompt = processor.apply_chat_template(lesson.messages(), tools=tools, add_generation_prompt=True)
    for pad, shown in ((SPECIAL[3], lesson.pictures), (SPECIAL[4], [lesson.video] if lesson.video else [])):
        first, *rest = prompt.split(pad)
        prompt = first
        for one, text in zip(shown, rest, strict=True):
            prompt += pad * len(memory.of(one).tokens) + text
    before, after = processor.tokenizer.encode(prompt), processor.tokenizer.encode(lesson.answer + END)
    return before + after, [IGNORED] * len(before) + after


def predict(
    model: Model, processor: Qwen2VLProcessor, lessons: list[Lesson], memory: Memory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every token to be learned: the logits, the token, its lesson."""
    rows = [encode(processor, lesson, memory) for lesson in lessons]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])[:, 1:]
    kinds = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
    hidden = model.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **_given(lessons, memory))
    counts = labels != IGNORED
    logits = model.lm_head(hidden.last_hidden_state[:, :-1][counts])
    return logits, labels[counts], counts.nonzero()[:, 0]


def _given(lessons: list[Lesson], memory: Memory) -> dict[str, Any]:
    """What the lessons show, as the model takes it from eyes that have looked already."""
    pictures = [memory.of(picture) for lesson in lessons for picture in lesson.pictures]
    videos = [memory.of(lesson.video) for lesson in lessons if lesson.video]
    given: dict[str, Any] = {"mm_encoder_outputs": {}}
    for name, seen in (("image", pictures), ("video", videos)):
        if seen:
            tokens = BaseModelOutputWithPooling(pooler_output=[one.tokens for one in seen])
            given["mm_encoder_outputs"][name] = tokens
            given[f"{name}_grid_thw"] = torch.stack([one.grid for one in seen])
    return given


def train(
    model: Model, processor: Qwen2VLProcessor, asked: list[Lesson], gate: Gate, rng: random.Random
) -> int:
    """Teaches until the gate holds for what is `asked`; gives the number of steps."""
    pictures = {kind: [drawn(*kind, rng) for _ in range(PICTURES)] for kind in KINDS}
    videos = {kind: [[drawn(*kind, rng)] * 2 * rng.randint(1, 8) for _ in range(VIDEOS)] for kind in KINDS}
    every = [Lesson("", "", some) for some in pictures.values()]
    every += [Lesson("", "", video=video) for some in videos.values() for video in some]
    memory = Memory(model, processor, asked + every)
    text, weak = model.model.language_model, list[Lesson]()
    steps = Steps(text, [text.layers], FALL_STEPS)
    for step in gate.steps():
        again = rng.sample(weak, min(ROWS // 4, len(weak)))
        lessons = [
            taught(rng, lambda kind: rng.choice(pictures[kind]), lambda kind: rng.choice(videos[kind]))
            for _ in range(ROWS - len(again))
        ]
        logits, labels, _ = predict(model, processor, lessons + again, memory)
        steps.take(functional.cross_entropy(logits, labels))
        if gate.due(step):
            found = leads(model, processor, asked, memory)
            weak = [lesson for lesson, lead in zip(asked, found, strict=True) if lead < gate.clear]
            if gate.holds(found):
                break
    return step


@torch.inference_mode()
def leads(model: Model, processor: Qwen2VLProcessor, lessons: list[Lesson], memory: Memory) -> list[float]:
    """For each of `lessons`, by how much a right token leads the best wrong one at least, in logits."""
    found: list[float] = []
    for first in range(0, len(lessons), ROWS):
        some = lessons[first : first + ROWS]
        logits, labels, owners = predict(model, processor, some, memory)
        found += least(ahead(logits, labels), owners, len(some))
    return found
