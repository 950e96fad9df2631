"""The stage behind `serve`: what can be refused before vLLM starts, and the command it becomes."""
