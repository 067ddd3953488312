"""fitted"""
