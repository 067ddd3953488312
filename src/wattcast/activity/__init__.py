"""activity"""
