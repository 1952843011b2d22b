"""How are gradients summed, without a framework?"""
