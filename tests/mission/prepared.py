"""A callback as a program of Ray's pages has it. Replicas import this."""

from __future__ import annotations

from pathlib import Path

from penstock.serve.callbacks import CallbackBase


class Prepared(CallbackBase):
    """Brings the model itself, and tells the engine where it is."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
        self.llm_config.get_engine_config().hf_model_id = self.kwargs["local_path"]

    def on_after_node_init(self) -> None:
        Path(self.kwargs["told"]).write_text(self.llm_config.get_engine_config().hf_model_id)
