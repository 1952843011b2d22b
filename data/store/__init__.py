"""How are prepared datasets kept on disk, checked and removed?"""
