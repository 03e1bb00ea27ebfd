"""Text and features that a target makes of itself."""
