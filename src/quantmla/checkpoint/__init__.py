"""Reading and rewriting of checkpoint folders in safetensors form."""
