// SPDX-License-Identifier: Apache-2.0
//! NBD's bytes, as its doc/proto.md has them: the fixed newstyle handshake and
//! simple replies. Nothing here does I/O; whatever a client sends gives a value
//! or a [`ProtocolError`], never a panic.

/// Length of a request, in bytes.
pub const REQUEST: usize = 28;
/// Length of a simple reply without its data, in bytes.
pub const REPLY: usize = 16;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// The export is as described by the flags below.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
/// NBD_CMD_FLUSH is understood.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// NBD_CMD_FLAG_FUA is understood.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// NBD_CMD_TRIM is understood.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// NBD_CMD_WRITE_ZEROES is understood.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// What our exports are.
pub const EXPORT_FLAGS: u16 =
    FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES;

const COMMAND_FLAG_FUA: u16 = 1 << 0;

/// What makes a connection useless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The stream is not where a request should begin.
    #[error("the client sent {0:#010x} where a request should begin")]
    RequestMagic(u32),
    /// A payload too long to be received or skipped.
    #[error("the client announced {0} bytes of data; at most {1} are accepted")]
    TooLong(u32, u32),
    /// The client does not speak the fixed newstyle handshake.
    #[error("the client does not speak the fixed newstyle handshake (flags {0:#x})")]
    Handshake(u32),
    /// An option does not begin as one.
    #[error("the client sent {0:#018x} where an option should begin")]
    OptionMagic(u64),
    /// An option is longer than any that makes sense.
    #[error("the client sent an option of {0} bytes")]
    OptionTooLong(u32),
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Send data.
    Read,
    /// Take the data that follow.
    Write,
    /// Close the connection when all is answered.
    Disconnect,
    /// Make durable what was answered.
    Flush,
    /// The content is no longer wanted.
    Trim,
    /// Write zeros.
    WriteZeroes,
    /// Something newer.
    Other(u16),
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// Names the request in its reply.
    pub cookie: u64,
    /// What is wanted.
    pub command: Command,
    /// Durable when it is answered.
    pub fua: bool,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub length: u32,
}

impl RequestHead {
    /// From the first [`REQUEST`] bytes of `bytes`; None if there are fewer.
    pub fn decode(bytes: &[u8]) -> Option<Result<RequestHead, ProtocolError>> {
        let (magic, bytes) = u32_from(bytes)?;
        let (flags, bytes) = u16_from(bytes)?;
        let (command, bytes) = u16_from(bytes)?;
        let (cookie, bytes) = u64_from(bytes)?;
        let (offset, bytes) = u64_from(bytes)?;
        let (length, _) = u32_from(bytes)?;
        if magic != REQUEST_MAGIC {
            return Some(Err(ProtocolError::RequestMagic(magic)));
        }
        Some(Ok(RequestHead {
            cookie,
            command: match command {
                0 => Command::Read,
                1 => Command::Write,
                2 => Command::Disconnect,
                3 => Command::Flush,
                4 => Command::Trim,
                6 => Command::WriteZeroes,
                other => Command::Other(other),
            },
            fua: flags & COMMAND_FLAG_FUA != 0,
            offset,
            length,
        }))
    }

    /// As a client sends it.
    pub fn encode(&self) -> [u8; REQUEST] {
        let command = match self.command {
            Command::Read => 0,
            Command::Write => 1,
            Command::Disconnect => 2,
            Command::Flush => 3,
            Command::Trim => 4,
            Command::WriteZeroes => 6,
            Command::Other(other) => other,
        };
        let mut bytes = [0; REQUEST];
        bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&u16::from(self.fua).to_be_bytes());
        bytes[6..8].copy_from_slice(&command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// NBD's own error numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ReplyError {
    /// Done.
    None = 0,
    /// Input/output error.
    Io = 5,
    /// The request makes no sense.
    Invalid = 22,
    /// No space left.
    NoSpace = 28,
    /// Not understood.
    NotSupported = 95,
    /// Being closed.
    Shutdown = 108,
}

/// A simple reply; the data of a read follow it.
pub fn reply(cookie: u64, error: ReplyError) -> [u8; REPLY] {
    let mut bytes = [0; REPLY];
    bytes[0..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&(error as u32).to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

const SERVER_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_LIST: u32 = 3;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const ANSWER_ACK: u32 = 1;
const ANSWER_SERVER: u32 = 2;
const ANSWER_INFO: u32 = 3;
const ANSWER_UNSUPPORTED: u32 = 1 << 31 | 1;
const ANSWER_INVALID: u32 = 1 << 31 | 3;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// More than any option that is understood; names have at most 4096 bytes.
const LONGEST_OPTION: u32 = 16384;

/// What is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// In bytes.
    pub size: u64,
    /// The smallest unit of a request, in bytes.
    pub logical_block: u32,
    /// The longest read or write, in bytes.
    pub longest: u32,
}

/// What comes of a piece of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It goes on; more bytes are needed.
    Continue,
    /// Requests follow.
    Transmission,
    /// The client does not want to go on.
    End,
}

/// The server's side of a handshake.
#[derive(Debug)]
pub struct Handshake {
    export: Export,
    greeted: bool,
    no_zeroes: bool,
}

impl Handshake {
    /// A handshake about `export`. The greeting, which begins it, is appended
    /// to `output`.
    pub fn begin(export: Export, output: &mut Vec<u8>) -> Handshake {
        output.extend(SERVER_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        output.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Handshake {
            export,
            greeted: false,
            no_zeroes: false,
        }
    }

    /// Takes what the client has sent, and appends the answer to `output`.
    /// Returns how many bytes of `input` are used up; the others are to be
    /// given again, with what follows them.
    ///
    /// # Errors
    /// What makes it pointless to go on.
    pub fn feed(
        &mut self,
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), ProtocolError> {
        let mut rest = input;
        if !self.greeted {
            let Some((flags, left)) = u32_from(rest) else {
                return Ok((0, Step::Continue));
            };
            let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
            if flags & u32::from(FIXED_NEWSTYLE) == 0 || flags & !known != 0 {
                return Err(ProtocolError::Handshake(flags));
            }
            self.no_zeroes = flags & u32::from(NO_ZEROES) != 0;
            self.greeted = true;
            rest = left;
        }
        while let Some((option, data, left)) = next_option(rest)? {
            rest = left;
            let step = self.answer(option, data, output);
            if step != Step::Continue {
                return Ok((input.len() - rest.len(), step));
            }
        }
        Ok((input.len() - rest.len(), Step::Continue))
    }

    fn answer(&self, option: u32, data: &[u8], output: &mut Vec<u8>) -> Step {
        match option {
            OPTION_EXPORT_NAME => {
                output.extend(self.export.size.to_be_bytes());
                output.extend(EXPORT_FLAGS.to_be_bytes());
                if !self.no_zeroes {
                    output.extend([0; 124]);
                }
                Step::Transmission
            }
            OPTION_ABORT => {
                option_reply(option, ANSWER_ACK, &[], output);
                Step::End
            }
            OPTION_LIST if data.is_empty() => {
                // One export, without a name.
                option_reply(option, ANSWER_SERVER, &0u32.to_be_bytes(), output);
                option_reply(option, ANSWER_ACK, &[], output);
                Step::Continue
            }
            OPTION_INFO | OPTION_GO => {
                if !is_info_request(data) {
                    option_reply(option, ANSWER_INVALID, &[], output);
                    return Step::Continue;
                }
                self.describe(option, output);
                option_reply(option, ANSWER_ACK, &[], output);
                if option == OPTION_GO {
                    Step::Transmission
                } else {
                    Step::Continue
                }
            }
            OPTION_LIST => {
                option_reply(option, ANSWER_INVALID, &[], output);
                Step::Continue
            }
            _ => {
                option_reply(option, ANSWER_UNSUPPORTED, &[], output);
                Step::Continue
            }
        }
    }

    fn describe(&self, option: u32, output: &mut Vec<u8>) {
        let mut info = Vec::with_capacity(14);
        info.extend(INFO_EXPORT.to_be_bytes());
        info.extend(self.export.size.to_be_bytes());
        info.extend(EXPORT_FLAGS.to_be_bytes());
        option_reply(option, ANSWER_INFO, &info, output);
        info.clear();
        info.extend(INFO_BLOCK_SIZE.to_be_bytes());
        info.extend(self.export.logical_block.to_be_bytes());
        info.extend(4096u32.max(self.export.logical_block).to_be_bytes());
        info.extend(self.export.longest.to_be_bytes());
        option_reply(option, ANSWER_INFO, &info, output);
    }
}

/// Its number, its data, and what follows it.
type HandshakeOption<'a> = (u32, &'a [u8], &'a [u8]);

/// The first option in `bytes`.
fn next_option(bytes: &[u8]) -> Result<Option<HandshakeOption<'_>>, ProtocolError> {
    let Some((magic, rest)) = u64_from(bytes) else {
        return Ok(None);
    };
    if magic != OPTION_MAGIC {
        return Err(ProtocolError::OptionMagic(magic));
    }
    let Some((option, rest)) = u32_from(rest) else {
        return Ok(None);
    };
    let Some((length, rest)) = u32_from(rest) else {
        return Ok(None);
    };
    if length > LONGEST_OPTION {
        return Err(ProtocolError::OptionTooLong(length));
    }
    Ok(rest
        .split_at_checked(length as usize)
        .map(|(data, rest)| (option, data, rest)))
}

/// Whether the data of NBD_OPT_INFO or NBD_OPT_GO are whole: a name, and a
/// list of what is to be told. There is one export, whatever it is called.
fn is_info_request(data: &[u8]) -> bool {
    let Some((length, rest)) = u32_from(data) else {
        return false;
    };
    let Some((_, rest)) = rest.split_at_checked(length as usize) else {
        return false;
    };
    let Some((count, rest)) = u16_from(rest) else {
        return false;
    };
    rest.len() == usize::from(count) * 2
}

fn option_reply(option: u32, answer: u32, data: &[u8], output: &mut Vec<u8>) {
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.to_be_bytes());
    output.extend(answer.to_be_bytes());
    output.extend((data.len() as u32).to_be_bytes());
    output.extend(data);
}

fn u16_from(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*head), rest))
}

fn u32_from(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*head), rest))
}

fn u64_from(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (head, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*head), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EXPORT: Export = Export {
        size: 1 << 30,
        logical_block: 512,
        longest: 1 << 20,
    };

    fn option(number: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn go() -> Vec<u8> {
        // No name, no wishes.
        option(OPTION_GO, &[0, 0, 0, 0, 0, 0])
    }

    fn hello() -> Vec<u8> {
        3u32.to_be_bytes().to_vec()
    }

    #[test]
    fn a_client_that_says_go_gets_the_size_and_then_sends_requests() {
        let mut output = Vec::new();
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        assert_eq!(&output[..16], b"NBDMAGICIHAVEOPT");
        output.clear();
        let input = [hello(), go(), vec![0x25]].concat();
        let (used, step) = handshake.feed(&input, &mut output).unwrap();
        assert_eq!((used, step), (input.len() - 1, Step::Transmission));
        let size = EXPORT.size.to_be_bytes();
        assert!(output.windows(8).any(|window| window == size));
    }

    #[test]
    fn a_handshake_may_come_byte_by_byte() {
        let mut output = Vec::new();
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        let input = [hello(), option(99, b"what"), go()].concat();
        let (mut pending, mut last) = (Vec::new(), Step::Continue);
        for byte in &input {
            assert_eq!(last, Step::Continue);
            pending.push(*byte);
            let (used, step) = handshake.feed(&pending, &mut output).unwrap();
            pending.drain(..used);
            last = step;
        }
        assert_eq!(last, Step::Transmission);
        assert!(pending.is_empty());
    }

    #[test]
    fn an_unknown_option_is_answered_and_the_handshake_goes_on() {
        let mut output = Vec::new();
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        output.clear();
        let input = [hello(), option(5, b"")].concat();
        let (used, step) = handshake.feed(&input, &mut output).unwrap();
        assert_eq!((used, step), (input.len(), Step::Continue));
        assert_eq!(&output[12..16], &ANSWER_UNSUPPORTED.to_be_bytes());
    }

    #[test]
    fn an_option_that_is_cut_short_inside_is_refused() {
        for data in [&b""[..], &[0, 0, 0, 9, 0, 0], &[0, 0, 0, 0, 0, 1]] {
            let mut output = Vec::new();
            let mut handshake = Handshake::begin(EXPORT, &mut output);
            output.clear();
            let input = [hello(), option(OPTION_GO, data)].concat();
            let (_, step) = handshake.feed(&input, &mut output).unwrap();
            assert_eq!(step, Step::Continue, "{data:?}");
            assert_eq!(&output[12..16], &ANSWER_INVALID.to_be_bytes());
        }
    }

    #[test]
    fn oldstyle_clients_and_noise_are_refused() {
        let mut output = Vec::new();
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        let error = handshake.feed(&[0; 4], &mut output).unwrap_err();
        assert_eq!(error, ProtocolError::Handshake(0));
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        let input = [hello(), b"GET / HTTP/1.1\r\n".to_vec()].concat();
        let error = handshake.feed(&input, &mut output).unwrap_err();
        assert!(matches!(error, ProtocolError::OptionMagic(_)));
        let mut handshake = Handshake::begin(EXPORT, &mut output);
        let mut long = option(OPTION_GO, &[]);
        long[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
        let error = handshake.feed(&[hello(), long].concat(), &mut output);
        assert_eq!(error, Err(ProtocolError::OptionTooLong(u32::MAX)));
    }

    fn commands() -> impl Strategy<Value = Command> {
        prop_oneof![
            Just(Command::Read),
            Just(Command::Write),
            Just(Command::Disconnect),
            Just(Command::Flush),
            Just(Command::Trim),
            Just(Command::WriteZeroes),
            (7u16..).prop_map(Command::Other),
        ]
    }

    proptest! {
        #[test]
        fn a_request_is_decoded_as_it_was_encoded(
            cookie: u64, command in commands(), fua: bool, offset: u64, length: u32,
        ) {
            let head = RequestHead { cookie, command, fua, offset, length };
            let bytes = head.encode();
            prop_assert_eq!(RequestHead::decode(&bytes), Some(Ok(head)));
            prop_assert_eq!(RequestHead::decode(&bytes[..REQUEST - 1]), None);
        }

        #[test]
        fn a_handshake_survives_whatever_is_sent(input: Vec<u8>, greeted: bool) {
            let mut output = Vec::new();
            let mut handshake = Handshake::begin(EXPORT, &mut output);
            let input = if greeted { [hello(), input].concat() } else { input };
            if let Ok((used, _)) = handshake.feed(&input, &mut output) {
                prop_assert!(used <= input.len());
            }
        }
    }
}
