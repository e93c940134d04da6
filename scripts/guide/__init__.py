"""The guide "From naive to fast": its figures, tables and pictures, made from records (`scripts/guide_page.py`)."""
