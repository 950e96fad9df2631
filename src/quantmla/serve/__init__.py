"""The packed cache in other people's engines."""
