"""The few lines that must be machine code: walks through memory that Python would be too slow for."""
