"""The documents that the library was written from, run as a reader would run them."""
