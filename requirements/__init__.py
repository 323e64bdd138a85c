"""What is installed and by which hashes: `*.txt` name every file, `lock` writes them, `install` obeys them."""
