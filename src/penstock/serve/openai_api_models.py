"""Requests and responses of the handle API, under the module path that users know."""

from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from penstock.serve.replica.handles.models import ChatCompletionRequest as ChatCompletionRequest
from penstock.serve.replica.handles.models import ChatCompletionResponse as ChatCompletionResponse
from penstock.serve.replica.handles.models import ClassificationRequest as ClassificationRequest
from penstock.serve.replica.handles.models import ClassificationResponse as ClassificationResponse
from penstock.serve.replica.handles.models import CompletionRequest as CompletionRequest
from penstock.serve.replica.handles.models import CompletionResponse as CompletionResponse
from penstock.serve.replica.handles.models import DetokenizeRequest as DetokenizeRequest
from penstock.serve.replica.handles.models import DetokenizeResponse as DetokenizeResponse
from penstock.serve.replica.handles.models import EmbeddingRequest as EmbeddingRequest
from penstock.serve.replica.handles.models import EmbeddingResponse as EmbeddingResponse
from penstock.serve.replica.handles.models import ErrorInfo as ErrorInfo
from penstock.serve.replica.handles.models import ErrorResponse as ErrorResponse
from penstock.serve.replica.handles.models import MessagesRequest as MessagesRequest
from penstock.serve.replica.handles.models import MessagesResponse as MessagesResponse
from penstock.serve.replica.handles.models import PoolingRequest as PoolingRequest
from penstock.serve.replica.handles.models import PoolingResponse as PoolingResponse
from penstock.serve.replica.handles.models import RawRequestInfo as RawRequestInfo
from penstock.serve.replica.handles.models import RerankRequest as RerankRequest
from penstock.serve.replica.handles.models import RerankResponse as RerankResponse
from penstock.serve.replica.handles.models import ResponsesRequest as ResponsesRequest
from penstock.serve.replica.handles.models import ResponsesResponse as ResponsesResponse
from penstock.serve.replica.handles.models import ScoreRequest as ScoreRequest
from penstock.serve.replica.handles.models import ScoreResponse as ScoreResponse
from penstock.serve.replica.handles.models import TokenizeRequest as TokenizeRequest
from penstock.serve.replica.handles.models import TokenizeResponse as TokenizeResponse
from penstock.serve.replica.handles.models import TranscriptionRequest as TranscriptionRequest
from penstock.serve.replica.handles.models import TranscriptionResponse as TranscriptionResponse
from penstock.serve.replica.handles.models import TranscriptionStreamResponse as TranscriptionStreamResponse

CompletionStreamResponse = Completion
ChatCompletionStreamResponse = ChatCompletionChunk
