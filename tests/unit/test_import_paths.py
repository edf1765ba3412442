"""What users import stays where it is, and costs no more than they asked for."""

from __future__ import annotations

from importlib import import_module

import pytest

PATHS = {
    "penstock.serve": (
        *(
            "CallbackBase",
            "CloudMirrorConfig",
            "GatewayConfig",
            "LLMConfig",
            "LLMRouter",
            "LLMServer",
            "LLMServingArgs",
            "LoraConfig",
            "ModelClient",
            "ModelLoadingConfig",
            "VLLMService",
        ),
        *("build_dp_deployment", "build_dp_openai_app", "build_llm_deployment", "build_openai_app"),
        *("build_pd_openai_app", "endpoint"),
    ),
    "penstock.serve.builders": (
        *("build_dp_deployment", "build_dp_openai_app", "build_llm_deployment", "build_openai_app"),
        "build_pd_openai_app",
    ),
    "penstock.serve.callbacks": ("CallbackBase", "CallbackCtx"),
    "penstock.serve.configs": ("CloudMirrorConfig", "LLMConfig", "LLMServingArgs", "LoraConfig"),
    "penstock.serve.deployment": ("DPServer", "LLMServer"),
    "penstock.serve.ingress": ("DEFAULT_ENDPOINTS", "OpenAiIngress", "make_fastapi_ingress"),
    "penstock.serve.request_router": ("PrefixCacheAffinityRouter",),
    "penstock.serve.deployments": ("LLMRouter", "LLMServer", "VLLMService"),
    "penstock.serve.openai_api_models": (
        "ChatCompletionRequest",
        "CompletionRequest",
        "TranscriptionRequest",
    ),
    "penstock.serve.routing": ("Asked", "Candidates", "Pick"),
    "penstock.data": (
        *("EngineProcessorConfig", "HttpRequestProcessorConfig", "LLMConfig", "Processor", "ProcessorConfig"),
        *("ServeDeploymentProcessorConfig", "vLLMEngineProcessorConfig", "SGLangEngineProcessorConfig"),
        *("ChatTemplateStageConfig", "TokenizerStageConfig", "DetokenizeStageConfig"),
        *("PrepareMultimodalStageConfig", "HttpRequestStageConfig", "batch", "batched"),
        *("build_llm_processor", "build_processor", "shared_engine"),
    ),
    "penstock.config": (
        *("AcceleratorConfig", "Application", "BucketSource", "CallbackConfig", "GatewayConfig", "LLMConfig"),
        *("LLMServingArgs", "LoraConfig", "ModelLoadingConfig", "OnDemandConfig", "PlacementGroupConfig"),
        *("Settings", "accelerator_kind", "check_accelerator", "load_applications", "load_configs"),
    ),
    "penstock.engines.process.engine": ("ProcessEngine",),
    "penstock.engines.sglang.engine": ("SGLangEngine",),
    "penstock.engines.sim.engine": ("SimEngine",),
    "penstock.engines.vllm.engine": ("VLLMEngine",),
    "penstock.engine": (
        *("ASGIApp", "Delta", "Engine", "Load", "Logprob", "Progress", "Prompt"),
        *("DEFAULT_WEIGHTS", "Gang", "Manner", "Message", "Prepared", "Receive", "Scope", "Send", "Shortcut"),
        *("Spent", "gang", "kept_here", "prepared", "shortcut", "silent", "using_adapter", "watched"),
    ),
    "penstock.errors": ("BadRequest", "Error"),
}


@pytest.mark.parametrize("module", PATHS)
def test_users_import_paths_stay(module: str):
    found = import_module(module)
    assert [name for name in PATHS[module] if not hasattr(found, name)] == []
    assert set(getattr(found, "__all__", PATHS[module])) >= set(PATHS[module])


def test_a_name_that_a_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'penstock\.serve' has no attribute 'Nobody'"):
        import_module("penstock.serve").Nobody  # noqa: B018
