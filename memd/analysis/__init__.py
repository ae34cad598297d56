"""What a model does inside, measured on a text: not part of serving."""
