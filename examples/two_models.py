"""Two models behind one address: LLMRouter builds their deployments from the configs."""

from ray import serve

from penstock.serve import LLMConfig, LLMRouter

helper = LLMConfig(model_loading_config={"model_id": "helper", "model_source": "demo"})
pretender = LLMConfig(  # a simulator needs no weights: handy where only the shape of an answer matters
    model_loading_config={"model_id": "pretender"},
    llm_engine="sim",
)
serve.run(LLMRouter.as_deployment().bind([helper, pretender]))
