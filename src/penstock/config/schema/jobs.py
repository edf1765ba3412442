"""`JobsConfig`: what users say about the Files and Batches APIs."""

from __future__ import annotations

from pydantic import ValidationInfo, field_validator

from penstock.config.schema.paths import from_file
from penstock.config.schema.strict import StrictModel, optional, setting

_MIB = 2**20


class JobsConfig(StrictModel):
    """OpenAI's Files and Batches APIs."""

    storage: str | None = optional(
        "Folder, or a URL of a bucket or of fsspec, for files, batches and versions of the fleet. A relative "
        "path counts from the folder of the config file. Without it, a folder of the cache of the node that "
        "runs the gateway, and no versions.",
        min_length=1,
    )
    max_storage_bytes: int | None = optional(
        "Size limit of all files together; without it, the disk's.", gt=0
    )
    max_file_bytes: int = setting(512 * _MIB, "Size limit of one uploaded file.", gt=0)
    max_batch_bytes: int = setting(200 * _MIB, "Size limit of a batch's input file.", gt=0)
    max_batch_lines: int = setting(50_000, "Limit of a batch's requests.", gt=0)

    @field_validator("storage")
    @classmethod
    def _from_the_file(cls, storage: str | None, info: ValidationInfo) -> str | None:
        return storage if storage is None or "://" in storage else from_file(storage, info)
