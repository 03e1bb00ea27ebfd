"""The marks of Kimi-K3's chats, each one token: around a name, between a name and its content, at the end."""

OPEN, CLOSE, SEPARATOR, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKS = (OPEN, CLOSE, SEPARATOR, END)
