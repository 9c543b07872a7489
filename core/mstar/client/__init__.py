"""The client of a server: `Client`, `AsyncClient`, what they give and what they raise. Imports no torch."""

from mstar.client.aio import AsyncClient, AsyncStream
from mstar.client.chat import Chat, Choice, Images
from mstar.client.errors import APIError, ClientError, ConnectionFailed, StreamBroken
from mstar.client.parts import audio, image, media, tensor, video
from mstar.client.results import Audio, Event, Image, Output, Progress, Result, Speech, Tensor, Text, ToolCall
from mstar.client.sync import Client, Stream

__all__ = [
    "APIError", "AsyncClient", "AsyncStream", "Audio", "Chat", "Choice", "Client", "ClientError", "ConnectionFailed",
    "Event", "Image", "Images", "Output", "Progress", "Result", "Speech", "Stream", "StreamBroken", "Tensor", "Text",
    "ToolCall", "audio", "image", "media", "tensor", "video",
]  # fmt: skip
