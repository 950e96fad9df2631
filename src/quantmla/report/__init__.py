"""One self-contained page about runs of quantize, eval, analyze and bench."""
