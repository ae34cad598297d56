"""The declarations of all metric families, by what they tell of."""
