"""A graph for each of several devices that compute one model together (tensor parallel)."""
