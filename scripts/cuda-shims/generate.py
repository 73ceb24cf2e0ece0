"""Writes, for each NVIDIA library, LIB.h (what lazy.c needs to know of it) and LIB.S (its trampolines, x86-64).

    generate.py CUDARC_SOURCE OUT      prints one line a library: name, number of functions

The functions are those that cudarc's bindings declare, so whatever Rust code calls through cudarc resolves.
"""

import os
import re
import sys

# link name: module of cudarc, what to load, what to load first, codes for "not loaded" and "no such function"
LIBRARIES = {
    "cuda": ("driver", ["libcuda.so.1"], [], 100, 500),  # CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_FOUND
    "cublas": ("cublas", ["libcublas.so.13"], ["libcublasLt.so.13"], 1, 15),  # NOT_INITIALIZED, NOT_SUPPORTED
    "cublasLt": ("cublaslt", ["libcublasLt.so.13"], [], 1, 15),
    "curand": ("curand", ["libcurand.so.10"], [], 203, 999),  # INITIALIZATION_FAILED, INTERNAL_ERROR
    "nvrtc": ("nvrtc", ["libnvrtc.so.13"], ["libnvrtc-builtins.so.13.*"], 11, 11),  # INTERNAL_ERROR
    "nccl": ("nccl", ["libnccl.so.2"], [], 2, 3),  # ncclSystemError, ncclInternalError
}

# Saves every register that can hold an argument, asks lazy.c for the function, and jumps there as if nothing were.
RESOLVER = """\
	.text
	.p2align 4
{p}_lazy:
	pushq %rax
	pushq %rcx
	pushq %rdx
	pushq %rsi
	pushq %rdi
	pushq %r8
	pushq %r9
	subq $136, %rsp
{save}
	movq 192(%rsp), %rdi	# the function's number, pushed by its trampoline
	call {p}_resolve
	movq %rax, %r11
{restore}
	addq $136, %rsp
	popq %r9
	popq %r8
	popq %rdi
	popq %rsi
	popq %rdx
	popq %rcx
	popq %rax
	addq $8, %rsp
	jmp *%r11
"""

TRAMPOLINE = """\
	.globl {name}
	.type {name}, @function
{name}:
	jmp *{p}_slots+{offset}(%rip)
	.size {name}, .-{name}
{p}_{i}:
	pushq ${i}
	jmp {p}_lazy
"""


def functions(source, module):
    """Name -> kind of what it returns: e an error code, s a text, o a text through an argument, z nothing of note."""
    with open(os.path.join(source, "src", module, "sys", "mod.rs")) as file:
        text = file.read()
    found = {}
    for match in re.finditer(r"^pub unsafe fn (\w+)\((.*?)\)\s*(?:->\s*([^{]+?))?\s*\{", text, re.M | re.S):
        name, result = match.group(1), (match.group(3) or "").strip()
        if name in ("is_culib_present", "culib"):  # cudarc's own
            continue
        if name in ("cuGetErrorString", "cuGetErrorName"):
            found[name] = "o"
        elif "c_char" in result:
            found[name] = "s"
        else:
            found[name] = "z" if result in ("usize", "") else "e"
    if not found:
        sys.exit(f"generate.py: no function found for {module}: have cudarc's bindings another form now?")
    return dict(sorted(found.items()))


def strings(items):
    return "".join(f'"{item}", ' for item in items)


def main(source, out):
    for library, (module, sonames, companions, no_library, no_function) in LIBRARIES.items():
        kinds = functions(source, module)
        with open(f"{out}/{library}.h", "w") as header:
            header.write(
                f'#define LIBNAME "{library}"\n#define ERR_NOLIB {no_library}\n#define ERR_NOSYM {no_function}\n'
                f"static const char *const sonames[] = {{{strings(sonames)}0}};\n"
                f"static const char *const companions[] = {{{strings(companions)}0}};\n"
                f"static const char *const names[] = {{{strings(kinds)}}};\n"
                f'static const char kinds[] = "{"".join(kinds.values())}";\n'
            )
        prefix = f"lazy_{library}"
        with open(f"{out}/{library}.S", "w") as assembly:
            assembly.write(
                RESOLVER.format(
                    p=prefix,
                    save="\n".join(f"\tmovups %xmm{i}, {16 * i}(%rsp)" for i in range(8)),
                    restore="\n".join(f"\tmovups {16 * i}(%rsp), %xmm{i}" for i in range(8)),
                )
            )
            for i, name in enumerate(kinds):
                assembly.write(TRAMPOLINE.format(p=prefix, name=name, i=i, offset=8 * i))
            # Writable slots, one a function; each begins at the code that fills it.
            assembly.write('\t.section .data.rel.local,"aw",@progbits\n\t.p2align 3\n')
            assembly.write(f"\t.globl {prefix}_slots\n\t.hidden {prefix}_slots\n{prefix}_slots:\n")
            assembly.writelines(f"\t.quad {prefix}_{i}\n" for i in range(len(kinds)))
            assembly.write('\t.section .note.GNU-stack,"",@progbits\n')
        print(library, len(kinds))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
