"""What does torch compute for workers that do not wait for each other, and for their parameter servers?"""
