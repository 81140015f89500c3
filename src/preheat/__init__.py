"""preheat: LLM serving in which no request ever meets a cold replica."""

__version__ = "0.1.0"
