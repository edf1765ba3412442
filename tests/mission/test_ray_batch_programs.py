"""Programs for each topic of Ray Data's page on LLMs, as that page writes them, on real engines.

Written for `ray.data.llm`, with `penstock.data` in its place. Each program starts an engine of its own, as
such programs do; that is why this file belongs to the full tier.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from ray import serve
from tests.cluster import ADAPTERS, Cluster, own_applications
from tests.models import model

import penstock
from penstock.data import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    ServeDeploymentProcessorConfig,
    SGLangEngineProcessorConfig,
    TokenizerStageConfig,
    build_processor,
    vLLMEngineProcessorConfig,
)
from penstock.serve import LLMConfig, build_llm_deployment
from penstock.serve.openai_api_models import ChatCompletionRequest
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS
from recipes.vision.pictures import draw

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("serve_url"), pytest.mark.parity("D1", "D2", "D15")]

DEMO = str(Path(penstock.__file__).parent / "demo")
GREEDY = {"temperature": 0.0, "max_tokens": 40, "detokenize": False}
SGLANG = Path(__file__).parents[2] / ".venv-sglang"
"""Made by `make sglang`."""

TEMPLATE = "<|im_start|>user\n{{ question }}<|im_end|>\n<|im_start|>assistant{{ '\n' }}"
"""Jinja would drop a newline at its end."""


@pytest.fixture(autouse=True, scope="module")
def quiet():
    ray.data.DataContext.get_current().enable_progress_bars = False


def greeting(row):
    return {"messages": [{"role": "user", "content": row["prompt"]}], "sampling_params": GREEDY}


def test_text_with_a_chat_template_of_ones_own():
    """The template asks another question than the rows do, so that the answer shows which was used."""
    config = vLLMEngineProcessorConfig(
        model_source="demo",
        engine_kwargs={"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_model_len": 256},
        chat_template_stage=ChatTemplateStageConfig(
            enabled=True, chat_template=TEMPLATE, batch_size=256, num_cpus=0.5
        ),
        tokenize_stage=TokenizerStageConfig(batch_size=512, num_cpus=0.5),
        detokenize_stage=DetokenizeStageConfig(enabled=True, concurrency=(2, 8)),
        concurrency=(1, 1),
        batch_size=64,
    )
    processor = build_processor(
        config,
        greeting,
        lambda row: dict(answer=row["generated_text"], **row),
        {"num_cpus": 0.5},
        {"num_cpus": 0.25},
        {"chat_template_kwargs": {"question": "Hello!"}},
    )
    rows = processor(ray.data.from_items([{"prompt": "Thank you!"}])).take_all()
    assert [row["answer"] for row in rows] == [BASE_ANSWERS["Hello!"]]


class Template:
    def __init__(self, model_id):
        from vllm.tokenizers import get_tokenizer

        self.tokenizer = get_tokenizer(model_id)

    async def __call__(self, batch):
        prompts = [
            self.tokenizer.apply_chat_template(list(one), tokenize=False, add_generation_prompt=True)
            for one in batch["messages"]
        ]
        return {"prompt": prompts, **batch}


class Tokenize(Template):
    async def __call__(self, batch):
        return {"tokenized_prompt": [self.tokenizer.encode(prompt) for prompt in batch["prompt"]], **batch}


class Detokenize(Template):
    async def __call__(self, batch):
        decoded = [
            self.tokenizer.decode(list(tokens), skip_special_tokens=True)
            for tokens in batch["generated_tokens"]
        ]
        return {**batch, "decoded": decoded}


@pytest.mark.parity("D8")
def test_a_tokenizer_of_ones_own_before_and_after_the_engine():
    """Prompts and messages are carried along; the rows are asked by their tokens."""
    folder = {"model_id": DEMO}
    config = vLLMEngineProcessorConfig(
        model_source=DEMO,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        batch_size=4,
    )
    processor = build_processor(
        config,
        postprocess=lambda row: {
            "generated_text": row.get("generated_text", ""),
            "generated_tokens": row.get("generated_tokens", []),
            "num_input_tokens": row.get("num_input_tokens", 0),
        },
    )
    asked = [greeting({"prompt": question}) for question in ("Hello!", "Thank you!")]
    dataset = ray.data.from_items(asked)
    dataset = dataset.map_batches(Template, fn_constructor_kwargs=folder, concurrency=1, batch_size=4)
    dataset = dataset.map_batches(Tokenize, fn_constructor_kwargs=folder, concurrency=1, batch_size=4)
    dataset = processor(dataset)
    dataset = dataset.map_batches(Detokenize, fn_constructor_kwargs=folder, concurrency=1, batch_size=4)
    rows = dataset.take_all()
    assert {row["decoded"] for row in rows} == {row["generated_text"] for row in rows}
    assert BASE_ANSWERS["Hello!"] in {row["generated_text"] for row in rows}
    assert {row["error"] for row in rows} == {None}


@pytest.mark.parity("D9")
def test_vision_and_a_picture_without_a_placeholder():
    config = vLLMEngineProcessorConfig(
        model_source=str(model("vision")),
        engine_kwargs={"trust_remote_code": True, "limit_mm_per_prompt": {"image": 1}},
        prepare_multimodal_stage=PrepareMultimodalStageConfig(
            enabled=True, model_config_kwargs={"max_model_len": 1024}
        ),
        runtime_env={"env_vars": {"VLLM_USE_V1": "1"}},
        accelerator_type="L4",
        batch_size=16,
    )
    assert config.prepare_multimodal_stage.enabled

    def asked(row):
        picture = draw("red", "circle")
        if row["form"] == "prompt":
            return {"prompt": "What is this?", "multimodal_data": {"image": [picture]}}
        content = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_pil", "image_pil": picture},
        ]
        return {"messages": [{"role": "user", "content": content}], "sampling_params": GREEDY}

    rows = build_processor(config, preprocess=asked)([{"form": "messages"}, {"form": "prompt"}])
    assert rows[0]["generated_text"] == "a red circle"
    assert rows[1]["error"]["status"] == 400
    assert "no placeholder for image 1" in rows[1]["error"]["message"]
    assert rows[1]["error"]["attempts"] == 1


@pytest.mark.parity("D7")
def test_adapters_from_a_bucket(cluster: Cluster):
    for adapter in ("pirate", "french"):
        cluster.bucket.upload(model("adapters") / adapter, ADAPTERS, adapter)
    config = vLLMEngineProcessorConfig(
        model_source="demo",
        dynamic_lora_loading_path=f"s3://{ADAPTERS}",
        engine_kwargs={"enable_lora": True, "max_lora_rank": 32, "max_loras": 1, "max_model_len": 256},
        batch_size=32,
    )
    rows = build_processor(
        config,
        preprocess=lambda row: {"model": row["model"], **greeting(row)},
        postprocess=lambda row: {"said": row["generated_text"], "model": row["model"]},
    )([{"prompt": "Hello!", "model": name} for name in ("demo", "french", "demo:pirate")])
    assert rows[0]["said"] == BASE_ANSWERS["Hello!"]
    assert rows[1]["said"] == ANSWERS["french"]["Hello!"]
    assert rows[2]["said"] == ANSWERS["pirate"]["Hello!"]


@pytest.mark.parity("D7")
def test_structured_output_in_both_words():
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "enum": [5]}}, "required": ["sum"]}
    forms = {
        "older": {"guided_decoding": {"json": schema}},
        "newer": {"structured_outputs": {"json": schema}},
    }
    rows = build_processor(
        vLLMEngineProcessorConfig(
            model_source="demo",
            engine_kwargs={
                "max_model_len": 256,
                "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            },
        ),
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": "Hello!"}],
            "sampling_params": {"temperature": 0.0, "max_tokens": 40} | forms[row["form"]],
        },
        postprocess=lambda row: {"found": json.loads(row["generated_text"])},
    )([{"form": "older"}, {"form": "newer"}])
    assert [row.get("found") for row in rows] == [{"sum": 5}] * 2, rows


@pytest.mark.parity("D6")
def test_classification_reads_embeddings():
    config = vLLMEngineProcessorConfig(
        model_source=str(model("classifier")),
        task_type="classify",
        engine_kwargs={"max_model_len": 128, "enforce_eager": True},
        batch_size=8,
        concurrency=1,
        apply_chat_template=False,
        detokenize=False,
    )
    rows = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["text"]},
        postprocess=lambda row: {
            "text": row["prompt"],
            "score": float(row["embeddings"][0]) if row.get("embeddings") is not None else None,
            "label": row["label"],
        },
    )([{"text": "the film is not bad"}, {"text": "the chair is round"}])
    assert [row["label"] for row in rows] == ["positive", "neutral"]
    assert all(0 <= row["score"] <= 1 for row in rows)


@pytest.mark.parity("D4")
def test_two_stages_on_one_deployment():
    config = LLMConfig(
        model_loading_config={"model_id": "chat", "model_source": "demo"},
        engine_kwargs={"enable_prefix_caching": True, "max_model_len": 256},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    )
    shared = ServeDeploymentProcessorConfig(
        deployment_name="engine",
        app_name="two-turns",
        dtype_mapping={"ChatCompletionRequest": ChatCompletionRequest},
        batch_size=64,
        request_timeout_s=120,
    )

    def turn(text):
        kwargs = {"model": "chat", "messages": [{"role": "user", "content": text}]}
        kwargs |= {"max_tokens": 40, "temperature": 0, "stream": False}
        return {"method": "chat", "dtype": "ChatCompletionRequest", "request_kwargs": kwargs}

    first = build_processor(
        shared,
        preprocess=lambda row: turn(row["prompt"]),
        postprocess=lambda row: {"prompt": row["prompt"], "first": row["choices"][0]["message"]["content"]},
    )
    second = build_processor(
        shared,
        preprocess=lambda row: turn(row["prompt"]),
        postprocess=lambda row: {"first": row["first"], "second": row["choices"][0]["message"]["content"]},
    )
    with own_applications():
        serve.run(
            build_llm_deployment(config, override_serve_options={"name": "engine"}),
            name="two-turns",
            route_prefix=None,
        )
        (row,) = second(first(ray.data.from_items([{"prompt": "Hello!"}]))).take_all()
    assert row["first"] == row["second"] == BASE_ANSWERS["Hello!"]


@pytest.mark.parity("D5")
@pytest.mark.skipif(not (SGLANG / "ready").exists(), reason="made by `make sglang`")
def test_sglang_takes_vllms_place():
    """Its template is a file's; each row's variables of it come from the stage."""
    config = SGLangEngineProcessorConfig(
        model_source="demo",
        engine_kwargs={
            "python": str(SGLANG / "bin" / "python"),
            "context_length": 512,
            "max_total_tokens": 4096,
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
        },
        chat_template_stage=ChatTemplateStageConfig(enabled=True, chat_template_kwargs={"question": "x"}),
        concurrency=1,
        batch_size=64,
    )
    processor = build_processor(config, greeting, lambda row: {"said": row["generated_text"], **row})
    assert processor.list_stage_names() == ["SGLangEngineStage"]
    rows = processor([{"prompt": "Hello!"}, {"prompt": "Thank you!"}])
    assert [row["said"] for row in rows] == [BASE_ANSWERS["Hello!"], BASE_ANSWERS["Thank you!"]]
    assert all(row["error"] is None and row["num_input_tokens"] > 0 for row in rows)
