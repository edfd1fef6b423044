class Failures: pass
class Goodput: pass
def goodput(): pass
