// SPDX-License-Identifier: Apache-2.0
//! Registers of a stopped process, some of which are set, as a node's kernel does it.

use std::ffi::{c_uint, c_void};
use std::io;
use std::ptr;

use localstor_lab_ptrace::ptrace;

/// What processors without AVX have, in bytes: less than any of today's.
const KNOWN: usize = 576;
/// Where the first of the XMM registers is, and the bits of which states there are
/// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, 13.4).
const XMM0: usize = 160;
const STATES: usize = 512;
const SSE: u8 = 1 << 1;
const NT_X86_XSTATE: usize = 0x202;

/// A process that waits to be told its registers.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new() -> Self {
        // SAFETY: the child calls nothing but these functions, which a process with
        // one thread of several may call.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: as above; what is null is not looked at.
            unsafe {
                ptrace(libc::PTRACE_TRACEME, 0, ptr::null_mut(), ptr::null_mut());
                libc::raise(libc::SIGSTOP);
                libc::_exit(0);
            }
        }
        let mut status = 0;
        // SAFETY: the status lives as long as the call.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFSTOPPED(status));
        Self(pid)
    }

    fn call(&self, request: c_uint, registers: &mut [u8]) -> io::Result<()> {
        let mut known = libc::iovec {
            iov_base: registers.as_mut_ptr().cast(),
            iov_len: registers.len(),
        };
        let kind = ptr::without_provenance_mut::<c_void>(NT_X86_XSTATE);
        // SAFETY: the iovec is of a slice that lives as long as the call, and the
        // tests' only thread is this one.
        match unsafe { ptrace(request, self.0, kind, (&raw mut known).cast()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: it is our child, which was not waited for since.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

#[test]
fn registers_are_set_by_who_knows_a_part_of_them() -> io::Result<()> {
    let stopped = Stopped::new();
    let mut set = [0; KNOWN];
    stopped.call(libc::PTRACE_GETREGSET, &mut set)?;
    set[XMM0..XMM0 + 16].copy_from_slice(b"sixteen of bytes");
    set[STATES] |= SSE;

    stopped.call(libc::PTRACE_SETREGSET, &mut set)?;

    let mut found = [0; KNOWN];
    stopped.call(libc::PTRACE_GETREGSET, &mut found)?;
    assert_eq!(found[XMM0..XMM0 + 16], set[XMM0..XMM0 + 16]);
    Ok(())
}
