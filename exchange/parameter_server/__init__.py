"""How do workers and servers of parameters talk, and which updates count?"""
