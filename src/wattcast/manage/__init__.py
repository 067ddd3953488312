"""control over time"""
