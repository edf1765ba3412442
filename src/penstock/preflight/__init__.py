"""Whether a model loads and fits, from its files and a table of devices: no engine, no torch, no GPU needed.

In the order of a call: `examine`, `files`, `model` (what config.json says), `sizes` (the arguments),
`weights`, `cache`, `devices`, `fit`, `loading` (what would stop a start); `start` asks
all of it of a model's config.
"""

from penstock.preflight.devices import Devices, devices_here, parse_devices
from penstock.preflight.examine import Examined, examine
from penstock.preflight.files import ModelFiles
from penstock.preflight.fit import MemoryFit
from penstock.preflight.loading import Mistake
from penstock.preflight.sizes import Sizes

__all__ = [
    "Devices",
    "Examined",
    "MemoryFit",
    "Mistake",
    "ModelFiles",
    "Sizes",
    "devices_here",
    "examine",
    "parse_devices",
]
