// SPDX-License-Identifier: Apache-2.0
//! Lets kernels of User Mode Linux run where the processor has registers that
//! they don't know of.
//!
//! A node's kernel sets the registers of its processes with `ptrace` and
//! `PTRACE_SETREGSET`. Those of floating point it keeps in 2696 bytes, which is all
//! that there is up to AVX-512. Processors with AMX have 11 KiB, and Linux takes
//! nothing less than the whole (`xstateregs_set` in `arch/x86/kernel/fpu/regset.c`:
//! `EFAULT`), so the first process of the node ends the kernel. Loaded before the C
//! library (`LD_PRELOAD`), this library has its `ptrace` fill up what is missing.

use std::ffi::{c_long, c_uint, c_void};
use std::mem;
use std::ptr;
use std::sync::OnceLock;

/// All that processors have today, and some more, in bytes: Linux takes of it what
/// it has registers for.
const WHOLE: usize = 16 << 10;

/// Of `linux/elf.h`
const NT_X86_XSTATE: usize = 0x202;

type Ptrace = unsafe extern "C" fn(c_uint, libc::pid_t, *mut c_void, *mut c_void) -> c_long;

/// Not on the stack, because a kernel's stacks have 16 KiB.
static mut REGISTERS: [u8; WHOLE] = [0; WHOLE];

/// `ptrace` of the C library, with all registers where the caller has some of them.
///
/// Those that the caller does not know are in their initial state, as its bits of
/// which states there are (`XSTATE_BV`) don't name them.
///
/// # Safety
///
/// As of the C library's; and one thread at a time sets registers, as the one that is
/// a node's only processor does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(
    request: c_uint,
    pid: libc::pid_t,
    addr: *mut c_void,
    data: *mut c_void,
) -> c_long {
    let Some(c_library) = c_library() else {
        // SAFETY: it is the calling thread's own.
        unsafe { *libc::__errno_location() = libc::ENOSYS };
        return -1;
    };
    if request != libc::PTRACE_SETREGSET || addr.addr() != NT_X86_XSTATE {
        // SAFETY: these are the caller's own arguments.
        return unsafe { c_library(request, pid, addr, data) };
    }
    // SAFETY: for this request data is an iovec, by the caller's promise.
    let known = unsafe { data.cast::<libc::iovec>().read() };
    if known.iov_len >= WHOLE {
        // SAFETY: these are the caller's own arguments.
        return unsafe { c_library(request, pid, addr, data) };
    }
    let registers = (&raw mut REGISTERS).cast::<u8>();
    let mut whole = libc::iovec {
        iov_base: registers.cast(),
        iov_len: WHOLE,
    };
    // SAFETY: the caller's iovec has so many bytes, which are fewer than there is
    // room for; nobody else uses the registers, by the caller's promise.
    unsafe {
        ptr::copy_nonoverlapping(known.iov_base.cast(), registers, known.iov_len);
        c_library(request, pid, addr, (&raw mut whole).cast())
    }
}

fn c_library() -> Option<Ptrace> {
    static FOUND: OnceLock<Option<Ptrace>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the name is a string of C; what the library that is asked next has
        // under it is this function of POSIX systems with Linux's types, or null,
        // which is None.
        unsafe {
            mem::transmute::<*mut c_void, Option<Ptrace>>(libc::dlsym(
                libc::RTLD_NEXT,
                c"ptrace".as_ptr(),
            ))
        }
    })
}
