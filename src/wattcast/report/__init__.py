"""What several packages share to show results, and predictions shown as text, JSON, figures and
HTML.
"""
