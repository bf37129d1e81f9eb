"""Command lines: on Windows a program gets one string and takes it apart itself."""

from __future__ import annotations

from collections.abc import Sequence


def joined(arguments: Sequence[str]) -> str:
    """Return the command line that WSL's interop makes of Linux arguments (FormatCommandLine, common/interop.cpp)."""
    words = []
    for argument in arguments:
        if argument and not any(char in argument for char in ' \t\r\n"'):
            words.append(argument)
            continue
        word = '"'
        backslashes = 0
        for char in argument:
            if char == "\\":
                backslashes += 1
                continue
            word += "\\" * (2 * backslashes + 1 if char == '"' else backslashes) + char
            backslashes = 0
        words.append(word + "\\" * (2 * backslashes) + '"')
    return " ".join(words)


def split(command_line: str) -> list[str]:
    """Return what CommandLineToArgvW makes of a command line; the first word is a file name and has simpler rules."""
    text = command_line
    if text.startswith('"'):
        end = text.find('"', 1)
        first, text = (text[1:end], text[end + 1 :]) if end > 0 else (text[1:], "")
    else:
        first = text.split(" ", 1)[0].split("\t", 1)[0]
        text = text[len(first) :]
    return [first, *_arguments(text)]


def _arguments(text: str) -> list[str]:
    arguments: list[str] = []
    word: str | None = None
    quoted = False
    index = 0
    while index < len(text):
        char = text[index]
        if char in " \t" and not quoted:
            if word is not None:
                arguments.append(word)
            word = None
            index += 1
            continue
        word = word or ""
        if char == "\\":
            end = index
            while end < len(text) and text[end] == "\\":
                end += 1
            count = end - index
            if end < len(text) and text[end] == '"':
                # Backslashes are themselves but before a quote; there an odd one makes the quote a character.
                word += "\\" * (count // 2)
                if count % 2:
                    word += '"'
                    end += 1
            else:
                word += "\\" * count
            index = end
            continue
        if char == '"':
            if quoted and text[index + 1 : index + 2] == '"':
                word += '"'
                index += 1
            quoted = not quoted
        else:
            word += char
        index += 1
    return arguments if word is None else [*arguments, word]
