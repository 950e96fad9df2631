"""Cache formats, the quantiser, bit packing and the bytes of a page; imports torch and `mla`."""
