"""Where the tokens of a sequence lie: packed pages, the bf16 window, and which is read how."""
