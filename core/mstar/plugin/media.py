"""What a processor may use to work on media. Unlike `mstar.plugin` itself it imports numpy and FFmpeg."""

from mstar.media.content import content_key
from mstar.media.tempo import TimeStretcher

__all__ = ["TimeStretcher", "content_key"]
