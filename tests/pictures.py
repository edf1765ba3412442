"""Pictures as requests hold them."""

import base64
import io

from PIL.Image import Image


def encoded(picture: Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def data_url(content: Image | bytes, kind: str = "image/png") -> str:
    content = content if isinstance(content, bytes) else encoded(content)
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
