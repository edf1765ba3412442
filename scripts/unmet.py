"""Prints what packages of this environment require and other versions of it fill: `unmet.py NAME`.

One requirement a line, as pip reads it. Packages that are not there at all count, but for those that have no
CPU build or are of use on GPUs alone. Looks at NAME and at what was installed in this environment itself, not
at what it borrows.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions

from packaging.requirements import Requirement

NOT_HERE = {"torch", "torchaudio", "torchcodec", "torchvision", "setuptools"}
"""Builds for CUDA on some indexes, which scripts/setup removes or mends; and a tool of building."""
FOR_GPUS = {
    *("apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor"),
    *("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "pynvvideocodec", "quack-kernels"),
    *("tilelang", "tokenspeed-mla"),
}
"""What vLLM's GPU build requires, and its CPU build does not."""


def unmet(owner: Distribution) -> list[str]:
    found: list[str] = []
    for text in owner.requires or ():
        need = Requirement(text)
        skipped = need.name.lower() in NOT_HERE | FOR_GPUS
        if skipped or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            fits = need.specifier.contains(distribution(need.name).version, prereleases=True)
        except PackageNotFoundError:
            fits = False
        if not fits:
            found.append(f"{need.name}{need.specifier}")
    return found


def main(name: str) -> None:
    own = list(distributions(path=[sysconfig.get_path("purelib")]))
    assert any(one.name == name for one in own), f"{name} is not installed here"
    print("\n".join(sorted({text for one in own for text in unmet(one)})), end="")


if __name__ == "__main__":
    main(sys.argv[1])
