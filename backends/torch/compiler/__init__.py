"""How does torch.compile compile what torch computes in a step?"""
