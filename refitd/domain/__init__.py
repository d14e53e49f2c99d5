"""The vocabulary of refitd: pure data and pure functions. Standard library and numpy only; `now` is passed in."""
