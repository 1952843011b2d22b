"""How do runs become one page that opens in a browser?"""
