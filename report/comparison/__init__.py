"""Which figures of which runs compare, and which run is ahead?"""
