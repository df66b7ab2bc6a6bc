"""Timelines in the formats of other tools: Perfetto, MindStudio Insight, Chakra."""
