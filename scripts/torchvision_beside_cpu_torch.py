"""Lets a torchvision that was built for CUDA be imported beside a CPU build of torch.

Written into the virtual environment by scripts/setup, only where the import fails without it, and run at each
start of Python there by a `.pth` file: so it is in every child process, engines and Ray workers included. It
imports nothing until torchvision itself is imported.

torchvision's compiled operators do not load then. It allows for that, except that it describes two of them
(`nms`, `qnms`) without asking. Declared without code they can be described; to call one is still an error.
What models need from it, resizing and converting pictures, is plain torch. Where the operators load, this
does nothing.
"""

import sys

_LIBRARIES = []  # torch forgets declarations that nobody holds


class _Declare:
    """Asked about every import; acts on the one before which the declarations must stand."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            _declare()


def _declare():
    if sys.modules["torchvision.extension"]._has_ops():
        return
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


sys.meta_path.insert(0, _Declare())
