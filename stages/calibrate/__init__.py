"""Fits a draft's confidence head to how often its tokens are really accepted."""
