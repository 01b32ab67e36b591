"""Is a point correct, and did it run what it claims?"""
