"""What plugins import: the declarations of a model, its processor, its hook, decoded media and errors.

Importing this package costs milliseconds and no torch. `Node` and `Task` here are declarations: a component of the
graph, and a thing a model can be asked for. The `nn.Module` behind a component and its turn at a method carry the
same names in `mstar.plugin.nodes`, which does import torch: a plugin's `nodes.py` imports from there. What a processor
may use on media is in `mstar.plugin.media`, which imports numpy and FFmpeg; on tokens, in `mstar.plugin.text`; to find
calls of tools in a text, in `mstar.plugin.tools`. A checkpoint's JSON files are read with `mstar.plugin.fields`.
"""

from mstar.errors import ConfigError, PluginError, RequestError
from mstar.plugin.graph import (
    KV,
    Alias,
    Call,
    Drop,
    DynamicLoop,
    Each,
    Fixed,
    Fork,
    Graph,
    LeftContext,
    Loop,
    Method,
    Node,
    Parallel,
    Port,
    Sequential,
    SlidingWindow,
    Stream,
    Walk,
    When,
    Whole,
)
from mstar.plugin.hooks import hookimpl
from mstar.plugin.processor import Processor
from mstar.plugin.spec import Checkpoint, Limits, ModelSpec, Task
from mstar.plugin.states import RequestView, Start, States, Then
from mstar.types import (
    AudioChunk,
    AudioPart,
    Chunk,
    Emission,
    Encoded,
    ImageChunk,
    ImagePart,
    Logprob,
    Message,
    Part,
    ProgressChunk,
    Request,
    SamplingParams,
    TensorChunk,
    TensorPart,
    TextChunk,
    TextPart,
    TokenLogprob,
    TokensPart,
    ToolCall,
    ToolCallChunk,
    UsualFrames,
    VideoPart,
)

__all__ = [
    "KV", "Alias", "AudioChunk", "AudioPart", "Call", "Checkpoint", "Chunk", "ConfigError", "Drop", "DynamicLoop",
    "Each", "Emission", "Encoded", "Fixed", "Fork", "Graph", "ImageChunk", "ImagePart", "LeftContext", "Limits",
    "Logprob", "Loop", "Message", "Method", "ModelSpec", "Node", "Parallel", "Part", "PluginError", "Port", "Processor",
    "ProgressChunk", "Request", "RequestError", "RequestView", "SamplingParams", "Sequential", "SlidingWindow",
    "Start", "States", "Stream", "Task", "TensorChunk", "TensorPart", "TextChunk", "TextPart", "Then", "TokenLogprob",
    "TokensPart", "ToolCall", "ToolCallChunk", "UsualFrames", "VideoPart", "Walk", "When", "Whole", "hookimpl",
]  # fmt: skip
