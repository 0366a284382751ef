"""Chats: the conversation, its tokens, and the engine that replies."""
