"""The vocabulary: what things are, and which moves are legal.

Everything here is a frozen value or a pure function. Nothing reads a clock, opens a file or
knows a socket, so that every rule of the product can be tested as a table.
"""
